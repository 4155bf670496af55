if(navigator.clipboard)document.querySelectorAll('button.copy').forEach((button)=>{
  const from=document.getElementById(button.dataset.copies);
  button.hidden=false;
  button.addEventListener('click',async()=>{
    await navigator.clipboard.writeText(from.dataset.whole||from.textContent.trim());
    const words=button.textContent;
    button.textContent='Copied';
    setTimeout(()=>{button.textContent=words;},1500);
  });
});
